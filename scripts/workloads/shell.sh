# Everyday commands. Needs: sh

set -e
cd "$(mktemp -d)"
for n in $(seq 1 200); do echo "line $n" > "file$n.txt"; done
find . -name '*.txt' -print0 | xargs -0 grep -h line | sort -r | uniq -c | awk '{s += $1} END {print s}'
sed -i 's/line/word/' file*.txt; cat file*.txt | tr a-z A-Z | cut -d' ' -f1 | head -3; wc -l file1.txt
mkdir -p a/b; cp -a file1.txt a/b; cp -r a c; mv c d; ln -s a/b e; tar czf t.tgz a; mkdir o; tar xzf t.tgz -C o; rm -r d
install -m 644 file2.txt a/f; touch -d yesterday a/f; stat a/f; chmod 600 a/f; du -s .; df . ; ls -laR > list; diff file1.txt file2.txt || true
dd if=/dev/zero of=z bs=1k count=10 2>/dev/null; truncate -s 1M z; od z | head -1; md5sum z; split -b 1000 list; tee copy < list > /dev/null
mkfifo p; (echo through > p) & cat p; wait; timeout 1 sleep 5 || true; (flock 9; echo locked) 9> lock; nice true; nohup true; env | wc -l; date; id
sleep 0.01; kill -0 $$; trap 'echo trapped' USR1; kill -USR1 $$; ulimit -n 64; xargs --version | head -1; sync; ps aux | head -1; uname -a
ionice true; setsid true; nproc; free | head -1; tail -n 1 -f file1.txt & sleep 0.1; kill %1 || kill $!; gzip -k list; bzip2 -k copy || true; xz -k p1 2>/dev/null || true
