set -e
R=$1; cd $R
python3 reshape/rename.py $R
.venv/bin/ruff format -q .
.venv/bin/ruff check -q --fix --select I001,RUF022,F401 . || true
.venv/bin/ruff format -q .
git add -A
.venv/bin/ruff check . --output-format concise || true
