"""For device compilers (LiteRT): quantizes every operation, and makes programs with fake-quantization markers."""

from jqinject.odml.conversion import COMPOSITE_NAME as COMPOSITE_NAME
from jqinject.odml.conversion import OdmlConversion as OdmlConversion
from jqinject.odml.qat import Int4Weight as Int4Weight
from jqinject.odml.qat import Int8Act as Int8Act
from jqinject.odml.qat import Int8DynamicAct as Int8DynamicAct
from jqinject.odml.qat import Int8Weight as Int8Weight
from jqinject.odml.qat import Int16Act as Int16Act
from jqinject.odml.qat import OdmlQat as OdmlQat
