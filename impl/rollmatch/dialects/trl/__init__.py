"""The dialect of TRL's vLLM server."""
