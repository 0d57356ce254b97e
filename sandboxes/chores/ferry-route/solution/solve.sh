mkdir -p ferry
cp "$(dirname "$0")/route.py" ferry/route.py
