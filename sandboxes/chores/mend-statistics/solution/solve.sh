cp "$(dirname "$0")/mended.py" statistics_lite.py
