"""The searches by name."""

from __future__ import annotations

from partition.exhaustive import exhaustive
from partition.five_stage import five_stage
from partition.ranked_pairs import ranked_pairs
from partition.search_result import Search

DEFAULT_SEARCH = "ranked-pairs"

SEARCHES: dict[str, Search] = {DEFAULT_SEARCH: ranked_pairs, "five-stage": five_stage, "exhaustive": exhaustive}
