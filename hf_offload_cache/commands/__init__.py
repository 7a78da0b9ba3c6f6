"""The verbs of the console, one a file: `add(verbs)` declares the arguments, `run(arguments)` does the work."""
