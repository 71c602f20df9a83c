# affdiv theory: what initial weights do to signal and gradient through depth, as numbers and as a figure.
from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.lab.errors import BadInputError


def theory(
    *,
    out: Annotated[Path, Parameter(help="Folder to write starts.svg to.")] = Path("theory"),
    features: Annotated[int, Parameter(help="Numbers in an input, of unit variance.")] = 3072,
    width: Annotated[int, Parameter(help="Neurons in a hidden layer.")] = 256,
    depth: Annotated[int, Parameter(help="Hidden layers.")] = 16,
    networks: Annotated[int, Parameter(help="Random networks to compare with the theory.")] = 4,
    seed: Annotated[int, Parameter(help="Seed of the first network.")] = 0,
) -> None:
    """Compare the starts of affine-like networks: signal, gradient and Gram cosine through depth, by theory and in random networks.

    docs/initialisation.md explains the figure. Nothing is trained; it takes some seconds.
    """
    limits = (("features", features, 1), ("width", width, 2), ("depth", depth, 2), ("networks", networks, 1), ("seed", seed, 0))
    for name, value, least in limits:
        if value < least:
            raise BadInputError(f"--{name} must be at least {least}, got {value}")
    from affine_divergence.lab.theory import follow, starts_figure, table

    found = [
        one
        for nonlinearity in ("tanh", "leaky_relu")
        for one in follow(nonlinearity, features=features, width=width, depth=depth, networks=networks, seed=seed)
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "starts.svg"
        path.write_text(starts_figure(found), encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error
    print("\n".join(table(found, sorted({1, 2, min(5, depth), depth}))))
    print(f"figure: {path}")
