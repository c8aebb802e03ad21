#!/usr/bin/env bash
# Builds the pages of docs/ into site/, and fails on a broken link. Makes the small environment .venv-docs at first, from
# requirements/docs.lock; after that it needs no network. PYTHON names a Python 3.11 or newer (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-docs
installed=$venv/docs.lock
if ! cmp -s requirements/docs.lock "$installed"; then
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --require-hashes -r requirements/docs.lock
  cp requirements/docs.lock "$installed"
fi
"$venv/bin/zensical" build --strict --clean
# A reader without a network sees the same pages: a link may lead elsewhere, what a page is made of may not.
if grep -rnoE '<(script|img|iframe)[^>]* src="?https?:[^>]*|<link[^>]* rel="?stylesheet[^>]* href="?https?:[^>]*' --include=*.html site; then
  echo "error: these pages load something from elsewhere; remedy: keep a copy in docs/, or leave it out" >&2
  exit 1
fi
echo "built site/; to read it: python3 -m http.server --directory site"
