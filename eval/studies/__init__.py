"""The paper's studies: each a small command that prints as it goes and writes JSON and a plot."""
