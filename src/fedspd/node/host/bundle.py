"""A node's bundle: opened, checked and parsed once."""

from dataclasses import dataclass
from pathlib import Path

from fedspd.config import ExperimentConfig, validate
from fedspd.core.errors import ConfigError, StorageError
from fedspd.node.identity.certificates import NodeIdentity, read_identity
from fedspd.node.identity.manifest import Manifest, Member, file_exists
from fedspd.storage.atomic import Json

SECURE_FILES = ("node.key", "node.crt", "ca.crt", "revoked.crl")  # besides manifest.json


@dataclass(frozen=True)
class Bundle:
    """A node's folder, the manifest of its network, the parsed config and the node's identity."""

    folder: Path
    manifest: Manifest
    config: ExperimentConfig
    identity: NodeIdentity | Member

    @property
    def is_newcomer(self) -> bool:
        """Whether the node was added after the network had been created."""
        return self.identity.client >= self.config.clients

    @property
    def owner(self) -> Json:
        """Return what the node's journal says about its owner."""
        return {
            "network": self.manifest.network,
            "node": self.identity.name,
            "agreement": self.manifest.agreement,
        }

    def journal_folder(self, chosen: Path | None) -> Path:
        """Return the chosen folder of the node's journal, or the one inside the bundle."""
        return chosen or self.folder / "state"


def open_bundle(folder: Path) -> Bundle:
    """Read and check a bundle; nothing else parses its config."""
    manifest = _read_manifest(folder)
    try:
        config = validate(manifest.config)
    except ConfigError as error:
        raise ConfigError(f"'{folder / 'manifest.json'}': config: {error}") from None
    return Bundle(folder, manifest, config, _find_identity(folder, manifest))


def _read_manifest(folder: Path) -> Manifest:
    if not file_exists(folder / "manifest.json"):
        raise StorageError(
            f"--bundle {folder}: not a node bundle; expected a folder with manifest.json. "
            "Create bundles with 'fedspd network create'."
        )
    manifest = Manifest.load(folder / "manifest.json")
    missing = [name for name in SECURE_FILES if manifest.secure and not file_exists(folder / name)]
    if missing:
        raise StorageError(
            f"--bundle {folder}: {', '.join(missing)} is missing; expected all files of the "
            "bundle. Copy the complete bundle again."
        )
    return manifest


def _find_identity(folder: Path, manifest: Manifest) -> NodeIdentity | Member:
    """Return the node that the certificate names, or in a plaintext network the folder."""
    if not manifest.secure:
        return manifest.member(folder.resolve().name)
    identity = read_identity(folder / "node.crt")
    if identity.network != manifest.network:
        raise StorageError(
            f"--bundle {folder}: manifest.json and node.crt belong to two networks; expected one. "
            "Copy the complete bundle again."
        )
    return identity
