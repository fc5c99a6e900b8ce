"""Constraints of tags that mark spans: BIO and its variants."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_choice

# all prefixes, those that continue a span, and those that have to be continued
_SCHEMES = {
    "BIO": ("BI", "I", ""),
    "IOB1": ("BI", "B", ""),
    "BIOES": ("BIES", "IE", "BI"),
    "BILOU": ("BILU", "IL", "BI"),
}


class TagConstraints(NamedTuple):
    """Whether each transition `[c, c]`, `[from, to]`, first tag `[c]` and last tag `[c]` is allowed, bool."""

    allowed_transitions: Tensor
    allowed_starts: Tensor
    allowed_ends: Tensor


def bio_constraints(tags: Sequence[str], scheme: Literal["BIO", "IOB1", "BIOES", "BILOU"] = "BIO") -> TagConstraints:
    """Returns which tags may follow each other, come first and come last: arguments of `LinearChainCRF`.

    Args:
        tags: the names of the c tags, in the order of their numbers: "O", or a prefix and a type such as "B-PER".
        scheme: "BIO": I-X follows B-X or I-X. "IOB1": B-X follows B-X or I-X, and I-X may begin a span. "BIOES": B-X
            and I-X are followed by I-X or E-X, which come nowhere else; S-X is a span of one word. "BILOU": the same
            with L and U in place of E and S.

    Raises:
        ValueError: a tag or the scheme is not one of these.

    Source: L. Ramshaw and M. Marcus, "Text chunking using transformation-based learning" (1995), arXiv:cmp-lg/9505040.

    >>> constraints = bio_constraints(["O", "B-PER", "I-PER"])
    >>> constraints.allowed_transitions
    tensor([[ True,  True, False],
            [ True,  True,  True],
            [ True,  True,  True]])
    >>> constraints.allowed_starts
    tensor([ True,  True, False])
    """
    check_choice("scheme", scheme, tuple(_SCHEMES))
    prefixes, continuing, unfinished = _SCHEMES[scheme]
    parts = [tag.partition("-")[::2] for tag in tags]
    for tag, (prefix, kind) in zip(tags, parts, strict=True):
        if tag != "O" and not (prefix in tuple(prefixes) and kind):
            expected = f"'O' or {', '.join(prefixes)} with a type, such as 'B-PER'"
            raise ValueError(f"tags: expected {expected}, got {tag!r}; pass the scheme of the tags")

    def allowed(before: tuple[str, str], after: tuple[str, str]) -> bool:
        same = before[0] in ("B", "I") and after[0] in continuing and before[1] == after[1]
        return same or (before[0] not in unfinished and after[0] not in continuing)

    return TagConstraints(
        torch.tensor([[allowed(before, after) for after in parts] for before in parts]),
        torch.tensor([prefix not in continuing for prefix, _ in parts]),
        torch.tensor([prefix not in unfinished for prefix, _ in parts]),
    )
