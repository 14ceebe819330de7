"""The commands of `fedspd network`: the operator's side of a network of peers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspd.cli import node

if TYPE_CHECKING:
    from rich.table import Table

    from fedspd.node.identity.manifest import Manifest

app = typer.Typer(
    help="Create a network of peers, with a certificate authority and a bundle for each device.",
    no_args_is_help=True,
)

NodeName = Annotated[str, typer.Argument(metavar="NAME", help="Name the node.")]
NetworkFolder = Annotated[Path, typer.Option(help="Use the network in this folder.")]
Days = Annotated[int, typer.Option(min=1, help="Let certificates expire after this many days.")]
DEFAULT_FOLDER = Path("plant")
DEFAULT_DAYS = 365
LOOPBACK = ("127.", "localhost:", "[::1]:")


@app.command()
def create(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="Read a TOML file, as 'fedspd run' does.")
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Override single keys of the file."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Write the network into this folder, new or empty.")
    ] = DEFAULT_FOLDER,
    names: Annotated[
        str | None,
        typer.Option(help="Name the nodes, separated by commas; default: node-0,node-1,..."),
    ] = None,
    host: Annotated[str, typer.Option(help="Use this host for all nodes.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=1, max=65535, help="Use this port for the first node, the next for the next."
        ),
    ] = 7700,
    addresses: Annotated[
        Path | None,
        typer.Option(help='Read a TOML file with name = "host:port" for every node instead.'),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Set the shape of an example, such as 1,28,28; default: from the data."),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(min=0, help="Set the number of classes, 0 for a regression; with --shape."),
    ] = None,
    days: Days = DEFAULT_DAYS,
    insecure_plaintext: Annotated[
        bool, typer.Option("--insecure-plaintext", help="Create it without TLS, for trials only.")
    ] = False,
) -> None:
    """Create a network: its certificate authority, and a bundle for each device."""
    from fedspd.config import check_used, load
    from fedspd.node.host import provisioning
    from fedspd.node.host.addresses import read_addresses

    agreed = load(config, values or [])
    check_used(agreed, [agreed.method])
    manifest = provisioning.create(
        agreed,
        out,
        names=names.split(",") if names else None,
        addresses=read_addresses(addresses) if addresses else None,
        host=host,
        port=port,
        example=_parse_example(shape, classes),
        secure=not insecure_plaintext,
        days=days,
    )
    _print_created(manifest, out)


def _print_created(manifest: "Manifest", out: Path) -> None:
    if not manifest.secure:
        typer.echo(
            "fedspd: this network has no TLS: anyone can read, alter and forge its messages. "
            "Use it for trials only.",
            err=True,
        )
    typer.echo(f"Created network {manifest.network} with {len(manifest.members)} nodes.")
    if all(member.address.startswith(LOOPBACK) for member in manifest.members):
        typer.echo("Its addresses are for this machine alone; --addresses sets those of devices.")
    typer.echo(f"Copy each folder in {out / 'nodes'} to its device.")
    typer.echo(f"Keep {out / 'ca.key'} secret and on this machine: it can add nodes.")


@app.command()
def add(
    name: NodeName,
    neighbours: Annotated[str, typer.Option(help="Link it to these nodes, separated by commas.")],
    address: Annotated[
        str | None,
        typer.Option(help="Set its host:port; default: the next port of the last node's host."),
    ] = None,
    network: NetworkFolder = DEFAULT_FOLDER,
    days: Days = DEFAULT_DAYS,
) -> None:
    """Add a node; only in a plaintext network do its neighbours need a new manifest."""
    from fedspd.node.host.provisioning import add
    from fedspd.node.identity.manifest import Manifest

    added = add(network, name, [each for each in neighbours.split(",") if each], address, days)
    typer.echo(f"Added node {added.name}: client {added.client}, address {added.address}.")
    typer.echo(f"Its certificate is valid for {days} days.")
    typer.echo(f"Copy {network / 'nodes' / added.name} to its device.")
    if not Manifest.load(network / "network.json").secure:
        names = ", ".join(added.neighbours)
        typer.echo(f"Copy the new manifest.json of {names} to their devices and restart them.")


@app.command()
def join(
    bundle: node.BundleFolder,
    data: Annotated[str, typer.Option(help="Train on this .npz, .csv or .parquet file.")],
    state: node.State = None,
    listen: node.Listen = None,
    status_port: node.StatusPort = 0,
    log: node.Log = node.LogFormat.human,
    insecure_plaintext: node.Plaintext = False,
) -> None:
    """Run an added node in a running network, from its neighbours' models and their next round."""
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
def revoke(name: NodeName, network: NetworkFolder = DEFAULT_FOLDER) -> None:
    """Revoke a node's certificate, so that its neighbours reject it."""
    from fedspd.node.host.provisioning import revoke

    revoke(network, name)
    typer.echo(f"Revoked node {name}.")
    typer.echo(f"Copy {network / 'revoked.crl'} into the bundle of every device.")


@app.command()
def show(
    network: NetworkFolder = DEFAULT_FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """List the nodes, their neighbours and their certificates."""
    from rich.console import Console

    from fedspd.node.host.provisioning import show

    found = show(network)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        # An IPv6 address has brackets, which are not markup.
        Console(markup=False, emoji=False).print(_build_table(found))


def _parse_example(shape: str | None, classes: int | None) -> tuple[tuple[int, ...], int] | None:
    """Return the shape and number of classes of an example, if both are given."""
    from fedspd.core.errors import ConfigError

    if shape is None and classes is None:
        return None
    if shape is None or classes is None:
        raise ConfigError(
            "--shape and --classes: only one is given; expected both. Give both, or neither to "
            "read them from the config's data."
        )
    lengths = shape.split(",")
    if not all(length.isascii() and length.isdigit() and int(length) for length in lengths):
        raise ConfigError(
            f"--shape {shape}: not a shape; expected integers from 1, separated by commas, "
            "such as 1,28,28."
        )
    return tuple(int(length) for length in lengths), classes


def _build_table(found: dict[str, Any]) -> "Table":
    from rich.table import Column, Table

    heads = ("name", "client", "address", "neighbours", "certificate until", "revoked")
    # an address that is cut off is of no use for a firewall
    columns = [Column(head, no_wrap=head in ("name", "address")) for head in heads]
    title = f"Network {found['network']}{'' if found['secure'] else ' (plaintext)'}"
    table = Table(*columns, title=title, title_justify="left")
    for each in found["nodes"]:
        neighbours = ", ".join(each["neighbours"])
        until = each["until"][:10] if each["until"] else "not here"
        revoked = "yes" if each["revoked"] else ""
        row = (each["name"], str(each["client"]), each["address"], neighbours, until, revoked)
        table.add_row(*row)
    return table
