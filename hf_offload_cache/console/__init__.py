"""The command line: one verb a file, the answer to one question, and the default model."""
