"""Language models: text and chats in, text out in parts."""
