"""Coverage-guided fuzzing of everything that reads a file: ``.ci/fuzz`` runs it.

The findings that were mended stand in ``findings``, and ``tests/fuzz/test_findings.py`` tries each again.
"""
