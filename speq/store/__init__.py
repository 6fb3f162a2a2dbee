"""Where exact experts and drafts lie on disk. Imports ops and codecs only."""
