//! The APIs whose requests contain a conversation.

/// The API of a request. Each has its own body; engines convert those of the others to chats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ConversationApi {
    /// `POST /v1/chat/completions` of OpenAI's API.
    #[default]
    Chat,
    /// `POST /v1/messages` and `POST /v1/messages/count_tokens` of Anthropic's API.
    Messages,
    /// `POST /v1/responses` of OpenAI's API.
    Responses,
}
