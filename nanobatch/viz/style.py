"""Colours that all figures share: a request has the same colour in each.

The palette is Okabe and Ito's, which colour-blind readers can tell apart. For print in grey,
bars also carry their request's number, and hatches or markers repeat what a colour says.
"""

from __future__ import annotations

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
IDLE = "#DDDDDD"  # an idle slot, a free block, unused budget
INK = "#222222"


def colour_of(request: int) -> str:
    """The colour of a request, by its number."""
    return OKABE_ITO[request % len(OKABE_ITO)]
