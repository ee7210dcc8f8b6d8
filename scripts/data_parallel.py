"""Time steps of one process and of two, for the curve of page 15a.

    python scripts/data_parallel.py     # one to three minutes

Goes through the sizes several times, so that a moment in which the machine had something else to do
hits one round and not one size. Writes all seconds to llm_course/pages/distributed_runs.json.
"""

import json

from llm_course.files import write_text
from llm_course.pages import shares
from llm_course.pages.distributed import RECORD
from llm_course.pages.ranks import Ranks

ROUNDS = 8
ROW_COUNTS = (1, 2, 4, 8, 16, 32)  # of 64 tokens


def main() -> None:
    ranks = Ranks(2, imports=shares.IMPORTS)
    rounds = [ranks.ask(shares.time_steps, row_counts=ROW_COUNTS)[0] for _ in range(ROUNDS)]
    ranks.close()
    write_text(RECORD, json.dumps({"processes": 2, "threads": 1, "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
