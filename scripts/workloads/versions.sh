# Needs: git

export HOME=$PWD; git init -q r && cd r && git config user.email a@b && git config user.name a && seq 1000 > f && git add f && git commit -qm one
git checkout -qb other && seq 1001 > f && git commit -qam two && git checkout -q - && git merge -q other && git log --oneline && git gc -q && git clone -q . ../s
git diff HEAD~1 | head -3; git stash list; git status --short; git grep -c 100; git worktree add -q ../w HEAD~1; git archive HEAD | tar t
