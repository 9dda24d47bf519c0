"""Trained models in Flax NNX, with the weights that other packages install: nothing is downloaded or copied here.

`weights.py` finds an installed package's file and reads it. Each other module has one port: a model class in plain NNX
and `load()`, which fills it. `check.py` compares the ports with the originals in torch. None of it needs jqinject.
"""
