"""The command line: main.py finds the verb, one file a verb says and does it, screen.py prints."""
