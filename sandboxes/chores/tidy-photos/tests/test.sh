# The script under test runs in this sandbox, so only what it leaves is looked at; see docs/security.md for what that costs.
set -eu
photos=$(mktemp -d)
mkdir -p "$photos/2025/12" "$photos/inner"
for name in IMG_20260314_a.jpg "IMG_20251224_tree at night.jpg" IMG_2026031_short.jpg notes.txt IMG_20260314_a.png inner/IMG_20260101_x.jpg; do
    echo "$name" >"$photos/$name"
done
echo first >"$photos/2025/12/IMG_20251201_b.jpg"
echo second >"$photos/IMG_20251201_b.jpg"
timeout 10 bash tidy.sh "$photos" >/dev/null
cd "$photos"
found=$(find . -type f | LC_ALL=C sort | tr '\n' '|')
expected="./2025/12/IMG_20251201_b.jpg|./2025/12/IMG_20251224_tree at night.jpg|./2026/03/IMG_20260314_a.jpg|./IMG_20251201_b.jpg"
expected="$expected|./IMG_20260314_a.png|./IMG_2026031_short.jpg|./inner/IMG_20260101_x.jpg|./notes.txt|"
[ "$found" = "$expected" ]
[ "$(cat 2025/12/IMG_20251201_b.jpg)" = first ]
[ "$(cat 'IMG_20251201_b.jpg')" = second ]
[ "$(cat '2025/12/IMG_20251224_tree at night.jpg')" = "IMG_20251224_tree at night.jpg" ]
