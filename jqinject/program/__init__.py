"""Quantizers between the operations of a model: its traced program is run with quantizers inserted."""

from jqinject.program.finding import HELD as HELD
from jqinject.program.finding import find_sites as find_sites
from jqinject.program.finding import names_of as names_of
from jqinject.program.finding import program_of_call as program_of_call
from jqinject.program.finding import sites_of_program as sites_of_program
from jqinject.program.finding import throws_away as throws_away
