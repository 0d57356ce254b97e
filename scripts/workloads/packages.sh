# A wheel, installed from a file. Needs: python3

mkdir p && printf 'def f():\n    return 1\n' > p/own.py && cd p
python3 - <<'END'
import zipfile
with zipfile.ZipFile("own-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("own.py", "def f():\n    return 1\n")
    wheel.writestr("own-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    wheel.writestr("own-1.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("own-1.dist-info/RECORD", "")
END
python3 -m venv v && v/bin/python -m pip install --no-index -q ./own-1-py3-none-any.whl && v/bin/python -c 'import own; print(own.f())'
