"""The rollout server: one HTTP front over one engine per replica, in three dialects."""
