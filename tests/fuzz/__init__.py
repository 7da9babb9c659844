"""Coverage-guided fuzzing of all code that reads files. ``.ci/fuzz`` runs it.

Fixed findings are stored in ``findings``. ``tests/fuzz/test_findings.py`` runs each of them again.
"""
