"""Experiments on the remainder: the tokens that a decoding step does not attend to, estimated from what is in memory.

`python -m eval.remainder.study --quick` shows that they run. `attention.py` has the simulated step, `fit.py` what is
fitted to a prompt, `study.py` the command.
"""
