# Needs: bash

set -e; shopt -s globstar; coproc cat; echo x >&"${COPROC[1]}"; read -r -u "${COPROC[0]}" y; diff <(seq 3) <(seq 3)
mapfile -t lines < <(seq 5); echo "${#lines[@]}"; [[ abc =~ b ]]; printf '%s\n' {1..3}; (cd /; pwd); time true; wait $! 2>/dev/null || true; kill $COPROC_PID
