"""What all figures share: a request has one colour everywhere.

The palette is Okabe and Ito's, which the colour-blind can tell apart; since greys must do too,
bars carry their request's number, and hatches or markers tell apart what a colour does.
"""

from __future__ import annotations

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
IDLE = "#DDDDDD"  # a slot, a block, a share of the budget that does nothing
INK = "#222222"


def colour_of(request: int) -> str:
    """The colour of a request, by its number."""
    return OKABE_ITO[request % len(OKABE_ITO)]
