"""What each rewrite of norms in a graph asks of a site, and its row when nothing is done."""

from __future__ import annotations

from normswap.find import GraphSite
from normswap.graphs import final_readers
from normswap.maps import Blocked
from normswap.plan import SiteOutcome


def require_own_tensors(site: GraphSite) -> None:
    """Raise :class:`Blocked` if a tensor of a norm is read by anything but its evaluations."""
    nodes = {n for instance in site.instances for n in instance.nodes}
    for tensor in site.tensors.values():
        if any(reader not in nodes for reader in final_readers(tensor.node)):
            raise Blocked("shared", f"{tensor.name!r} is also read elsewhere")


def kept_outcome(site: GraphSite, blocked: Blocked) -> SiteOutcome:
    """The row of a norm that stays as it is."""
    return SiteOutcome(
        site.site.name,
        site.kind,
        "kept",
        "refused",
        blocked.code,
        blocked.detail,
        names=site.site.names,
    )
