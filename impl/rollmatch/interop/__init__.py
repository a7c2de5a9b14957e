"""ms-swift's and TRL's commands and configurations, and portable vectors."""
