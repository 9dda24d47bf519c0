"""The inventories of other libraries' documentation: small tables in this repository, so that no build needs network.

`docs/inventories/NAME.txt` begins with the address of the documentation. Then each line has a name, its kind in
Sphinx's Python domain, and the page below the address.
"""

import tempfile
import zlib
from pathlib import Path

HEAD = """\
# Sphinx inventory version 2
# Project: {name}
# Version: 0
# The remainder of this file is compressed using zlib.
"""


def mapping(folder: Path) -> dict[str, tuple[str, str]]:
    """What `intersphinx_mapping` wants: for each table the address, and an inventory in Sphinx's own format."""
    made = Path(tempfile.mkdtemp(prefix="inventories"))
    found = {}
    for table in sorted(folder.glob("*.txt")):
        address, *rows = [line for line in table.read_text(encoding="utf-8").splitlines() if line]
        inventory = made / f"{table.stem}.inv"
        inventory.write_bytes(HEAD.format(name=table.stem).encode() + zlib.compress(_body(rows).encode()))
        found[table.stem] = (address, str(inventory))
    return found


def _body(rows: list[str]) -> str:
    lines = []
    for row in rows:
        name, kind, page = row.split()
        lines.append(f"{name} py:{kind} 1 {page}#{name} -\n")
    return "".join(lines)
