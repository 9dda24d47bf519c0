"""Sources of the number that a scale or a zero point is made from.

| source          | number                                                          | Variables                    |
|-----------------|-----------------------------------------------------------------|------------------------------|
| `Constant`      | a given one                                                     |                              |
| `Learned`       | a parameter that starts at a given one                          | `value`                      |
| `FromParameter` | the statistic of a weight, or of all that share a quantizer;    |                              |
|                 | or a parameter, filled once from that statistic                 | `value`, `init_done`         |
| `Running`       | the batch's statistic; in evaluation the running mean           | `running_stats`, `counter`   |
| `Collected`     | the batch's statistic for N steps, after that a parameter       | `value`, `buffer`, `counter` |
| `Dynamic`       | the statistic of the given tensor                               |                              |

A scale is a source with a `ScaleRule`, a zero point is a source with a `shift`.
"""

from jqinject.core.sources.from_tensor import Dynamic as Dynamic
from jqinject.core.sources.from_tensor import FromParameter as FromParameter
from jqinject.core.sources.given import Constant as Constant
from jqinject.core.sources.given import Learned as Learned
from jqinject.core.sources.runtime import Collected as Collected
from jqinject.core.sources.runtime import Running as Running
from jqinject.core.sources.source import DISTANCE as DISTANCE
from jqinject.core.sources.source import Number as Number
from jqinject.core.sources.source import Source as Source
