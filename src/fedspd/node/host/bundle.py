"""A node's bundle: opened, checked and parsed once."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedspd.config import ExperimentConfig, validate
from fedspd.core.errors import ConfigError, StorageError
from fedspd.core.imports import installed_code_only
from fedspd.core.machine import file_exists
from fedspd.node.identity.certificates import (
    NodeIdentity,
    is_signed_by,
    read_certificate,
    read_identity,
)
from fedspd.node.identity.manifest import Manifest, Member
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
    def valid_until(self) -> datetime | None:
        """Return when the node's certificate expires; None in a plaintext network."""
        return self.identity.valid_until if isinstance(self.identity, NodeIdentity) else None

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
    identity = _find_identity(folder, manifest)
    check_signature(folder / "manifest.json", manifest, folder / "ca.crt")
    try:
        with installed_code_only():
            config = validate(manifest.config)
    except ConfigError as error:
        raise ConfigError(f"'{folder / 'manifest.json'}': config: {error}") from None
    return Bundle(folder, manifest, config, identity)


def check_signature(path: Path, manifest: Manifest, ca: Path) -> None:
    """Refuse a manifest that the network's authority did not sign: it may name code."""
    if not is_signed_by(read_certificate(ca), manifest.signed_content, manifest.signature):
        raise StorageError(
            f"'{path}': changed after the network's authority signed it; expected the file as "
            "'fedspd network' wrote it. Copy it again; give a device's own data with --data."
        )


def _read_manifest(folder: Path) -> Manifest:
    if not file_exists(folder / "manifest.json"):
        raise StorageError(
            f"--bundle {folder}: not a node bundle; expected a folder with manifest.json. "
            "Create bundles with 'fedspd network create'."
        )
    manifest = Manifest.load(folder / "manifest.json")
    needed = SECURE_FILES if manifest.secure else ("ca.crt",)
    missing = [name for name in needed if not file_exists(folder / name)]
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
