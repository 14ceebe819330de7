"""A node's bundle: opened and checked."""

from pathlib import Path

from fedspd.config import validate
from fedspd.core.errors import ConfigError, StorageError
from fedspd.node.identity.certificates import NodeIdentity, read_identity
from fedspd.node.identity.manifest import Manifest, Member, file_exists
from fedspd.storage.atomic import Json

PAPERS = ("node.key", "node.crt", "ca.crt", "revoked.crl")  # of a node in a secure network


def manifest_of(bundle: Path) -> Manifest:
    path = bundle / "manifest.json"
    if not file_exists(path):
        raise StorageError(
            f"'{bundle}' is no bundle of a node, as there is no manifest.json in it: 'fedspd network create' makes them."
        )
    manifest = Manifest.load(path)
    if manifest.secure and (missing := [name for name in PAPERS if not file_exists(bundle / name)]):
        raise StorageError(
            f"The bundle '{bundle}' lacks {', '.join(missing)}: copy the whole folder again."
        )
    try:
        validate(manifest.config)
    except ConfigError as error:
        raise ConfigError(f"'{path}': config: {error}") from None
    return manifest


def whose(bundle: Path, manifest: Manifest) -> NodeIdentity | Member:
    """The node that a bundle belongs to: its certificate says so, or in a plaintext network the folder's name."""
    if not manifest.secure:
        return manifest.member(bundle.resolve().name)
    me = read_identity(bundle / "node.crt")
    if me.network != manifest.network:
        raise StorageError(
            f"manifest.json and node.crt in the bundle '{bundle}' are of two networks: copy the whole folder again."
        )
    return me


def part_in(manifest: Manifest, name: str) -> Json:
    """What a node takes part in, as its journal says it."""
    return {"network": manifest.network, "node": name, "agreement": manifest.agreement}
