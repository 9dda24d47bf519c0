"""Transforms: linear maps of features that come before a quantizer, and whose inverse is in the weight."""

from jqinject.core.transforms.channels import ChannelScale as ChannelScale
from jqinject.core.transforms.channels import Permutation as Permutation
from jqinject.core.transforms.hadamard import Hadamard as Hadamard
from jqinject.core.transforms.orthogonal import Orthogonal as Orthogonal
from jqinject.core.transforms.transform import Chain as Chain
from jqinject.core.transforms.transform import Sized as Sized
from jqinject.core.transforms.transform import SizedChain as SizedChain
from jqinject.core.transforms.transform import Transform as Transform
from jqinject.core.transforms.transform import along as along
