"""fedspd network: the operator's side of a network of peers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspd.cli import node

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="A network of peers: its authority, its nodes, and a bundle for each device.",
    no_args_is_help=True,
)

Node = Annotated[str, typer.Argument(help="name of the node")]
Network = Annotated[Path, typer.Option(help="folder of the network")]
Days = Annotated[int, typer.Option(min=1, help="how long certificates are valid")]
FOLDER = Path("plant")
YEAR = 365


@app.command()
def create(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="a TOML file, as `fedspd run` takes it")
    ],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="values on top of it")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder to make; new or empty")] = FOLDER,
    names: Annotated[
        str | None,
        typer.Option(help="of the nodes, with commas between them; default: node-0,node-1,..."),
    ] = None,
    host: Annotated[str, typer.Option(help="of all nodes")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="of the first node; the next one has the next")
    ] = 7700,
    addresses: Annotated[
        Path | None, typer.Option(help='TOML file with name = "host:port" for every node')
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="of an example, as 1,28,28; default: that of the config's data"),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=0, help="with --shape: number of classes; 0 for a regression")
    ] = None,
    days: Days = YEAR,
    insecure_plaintext: Annotated[
        bool,
        typer.Option("--insecure-plaintext", help="let nodes talk without TLS, for trials only"),
    ] = False,
) -> None:
    """Make a network: an authority of its own, and a bundle for each device."""
    from fedspd.config import load
    from fedspd.node.host import provisioning

    manifest = provisioning.create(
        load(config, values or []),
        out,
        names=names.split(",") if names else None,
        addresses=provisioning.read_addresses(addresses) if addresses else None,
        host=host,
        port=port,
        example=_example(shape, classes),
        secure=not insecure_plaintext,
        days=days,
    )
    if insecure_plaintext:
        typer.echo(
            "fedspd: nodes of this network may talk in plaintext, where anybody can listen and lie: for trials only.",
            err=True,
        )
    typer.echo(
        f"Network {manifest.network}, {len(manifest.members)} nodes: copy each folder of {out / 'nodes'} to its device."
    )
    typer.echo(f"Keep {out / 'ca.key'} here and to yourself: whoever has it can add nodes.")


@app.command()
def add(
    name: Node,
    neighbours: Annotated[str, typer.Option(help="whom it talks to, with commas between them")],
    address: Annotated[
        str | None, typer.Option(help="host:port; default: the next port of the last node's host")
    ] = None,
    network: Network = FOLDER,
    days: Days = YEAR,
) -> None:
    """Add a node between others; these need no change, unless the network is for plaintext."""
    from fedspd.node.host.provisioning import add
    from fedspd.node.identity.manifest import Manifest

    added = add(network, name, [each for each in neighbours.split(",") if each], address, days)
    typer.echo(
        f"Node {added.name} is client {added.client} at {added.address}: copy {network / 'nodes' / added.name} to its device."
    )
    if not Manifest.load(network / "network.json").secure:
        names = ", ".join(added.neighbours)
        typer.echo(
            f"Without certificates its neighbours must be told: give {names} the new manifest.json of their bundles, and restart them."
        )


@app.command()
def join(
    bundle: node.BundleFolder,
    data: Annotated[str, typer.Option(help="the device's own examples, as .npz")],
    state: node.State = None,
    listen: node.Listen = None,
    status_port: node.StatusPort = 0,
    log: node.Log = node.LogFormat.human,
    insecure_plaintext: node.Plaintext = False,
) -> None:
    """Run a node that was added, between running ones: it takes their models and takes part from the next round."""
    with node.running(log):
        from fedspd.node.host import start
        from fedspd.node.host.bundle import open_bundle

        start.run(
            open_bundle(bundle),
            data=data,
            state=state,
            listen=listen,
            status_port=status_port,
            insecure_plaintext=insecure_plaintext,
            joining=True,
        )


@app.command()
def revoke(name: Node, network: Network = FOLDER) -> None:
    """Shut a node out."""
    from fedspd.node.host.provisioning import revoke

    revoke(network, name)
    typer.echo(f"Node {name} is revoked.")
    typer.echo(
        f"Copy {network / 'revoked.crl'} into the bundle of every device: each refuses the node as soon as it has the file."
    )


@app.command()
def show(
    network: Network = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON")] = False,
) -> None:
    """All nodes, and whom the network still believes."""
    from rich.console import Console

    from fedspd.node.host.provisioning import show

    found = show(network)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        Console(markup=False, emoji=False).print(_table(found))  # an address may have brackets


def _example(shape: str | None, classes: int | None) -> tuple[tuple[int, ...], int] | None:
    from fedspd.core.errors import ConfigError

    if shape is None and classes is None:
        return None
    if shape is None or classes is None:
        raise ConfigError(
            "--shape and --classes go together: give both, or neither to take them from the config's data."
        )
    lengths = shape.split(",")
    if not all(length.isascii() and length.isdigit() and int(length) for length in lengths):
        raise ConfigError(
            f"--shape {shape}: expected whole numbers above 0 with commas between them, as 1,28,28."
        )
    return tuple(int(length) for length in lengths), classes


def _table(found: dict[str, Any]) -> "Table":
    from rich.table import Table

    title = f"Network {found['network']}{'' if found['secure'] else ', which allows plaintext'}"
    table = Table(
        "name",
        "client",
        "address",
        "neighbours",
        "certificate until",
        "revoked",
        title=title,
        title_justify="left",
    )
    for each in found["nodes"]:
        until = each["until"][:10] if each["until"] else "not here"
        table.add_row(
            each["name"],
            str(each["client"]),
            each["address"],
            ", ".join(each["neighbours"]),
            until,
            "yes" if each["revoked"] else "",
        )
    return table
