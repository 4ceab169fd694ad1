"""The format on disk: manifest, commit records, slot files, snapshots. It needs no engine; see docs/store-format.md."""
