"""Runs scripts one after another in one process: a path a line in, an empty line or a traceback as JSON out."""

import contextlib
import io
import json
import runpy
import sys
import traceback
import warnings


def answer_lines() -> None:
    """Run the scripts that are named."""
    answers = sys.stdout
    for line in sys.stdin:
        failed = ""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            try:
                runpy.run_path(line.strip(), run_name="__main__")
            except BaseException:
                failed = traceback.format_exc()
        print(json.dumps(failed), file=answers, flush=True)


if __name__ == "__main__":
    answer_lines()
