"""The native dialect: one control message per sync, versions, digests."""
