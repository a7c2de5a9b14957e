"""SFT on chats: the assistant's turns are taught."""
