cat > busiest.sh <<'SH'
awk '{print $3}' "$1" | sort | uniq -c | sort -k1,1nr -k2,2 | head -n 3 | awk '{print $2}'
SH
