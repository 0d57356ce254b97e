# Needs: pytest
cat > test_one.py <<'END'
import pytest
@pytest.mark.parametrize('n', range(5))
def test_one(n, tmp_path):
    (tmp_path / 'x').write_text('y')
END
python3 -m pytest -q -p no:cacheprovider test_one.py
