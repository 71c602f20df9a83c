# make reproduce: the quick study and its report.  make test: every test.  Both set up .venv first.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: reproduce test lint clean

reproduce: $(VENV)/lab.installed
	$(VENV)/bin/affdiv reproduce

test: $(VENV)/all.installed
	$(VENV)/bin/python -m pytest --numprocesses logical --dist worksteal $(PYTEST)

lint: $(VENV)/all.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) results

$(VENV)/%.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
