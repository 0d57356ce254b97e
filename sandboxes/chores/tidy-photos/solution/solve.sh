cat > tidy.sh <<'SH'
for file in "$1"/IMG_[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]_*.jpg; do
    [ -f "$file" ] || continue
    name=$(basename "$file")
    target="$1/${name:4:4}/${name:8:2}"
    mkdir -p "$target"
    [ -e "$target/$name" ] || mv "$file" "$target/$name"
done
SH
