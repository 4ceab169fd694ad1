"""The format on disk: manifest, records, slot files, snapshots; see docs/store-format.md."""
