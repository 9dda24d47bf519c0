"""A byte-level language model of Python's standard library: its text, the model, training, a checkpoint of integers.

`python examples/train_byte_lm.py` trains it; `benchmarks/recipes.py` quantizes it.
"""

from byte_lm.checkpoint import load as load
from byte_lm.checkpoint import save as save
from byte_lm.corpus import Corpus as Corpus
from byte_lm.evaluation import bits_of_windows as bits_of_windows
from byte_lm.model import ByteLM as ByteLM
from byte_lm.model import Size as Size
from byte_lm.training import Training as Training
