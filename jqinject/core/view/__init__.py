"""Views: how a tensor is laid out before a statistic reduces it.

A view brings the tensor to the form in which a statistic's `stats_reduce_dim` selects what shares a scale:
the whole tensor, or channels first and everything else flattened behind. `permute_dims` is applied first: an NNX
kernel has its output channel last, so `permute_dims=(1, 0)` brings it to the front.
"""

from jqinject.core.view.grouping import Blocks as Blocks
from jqinject.core.view.grouping import DynamicOverSubChannelBlockView as DynamicOverSubChannelBlockView
from jqinject.core.view.grouping import GroupingView as GroupingView
from jqinject.core.view.grouping import OverSubChannelBlockView as OverSubChannelBlockView
from jqinject.core.view.grouping import beside as beside
from jqinject.core.view.grouping import blocks_of as blocks_of
from jqinject.core.view.grouping import cut_of as cut_of
from jqinject.core.view.grouping import in_layout as in_layout
from jqinject.core.view.merging import MergingView as MergingView
from jqinject.core.view.merging import OverBatchOverOutputChannelView as OverBatchOverOutputChannelView
from jqinject.core.view.merging import OverBatchOverTensorView as OverBatchOverTensorView
from jqinject.core.view.merging import OverOutputChannelView as OverOutputChannelView
from jqinject.core.view.merging import OverOutputFeaturesView as OverOutputFeaturesView
from jqinject.core.view.merging import OverTensorView as OverTensorView
