//! A model: its chat templates, its tokenizer, and its caches.

use std::path::Path;
use std::sync::OnceLock;

use minijinja::Value;

use crate::api::ConversationApi;
use crate::body::{ChatBody, TextPrompt};
use crate::body_cache::ModelBodyCache;
use crate::caches::PromptCaches;
use crate::chat::{
    self, MessagesBody, PreparedMessage, ResponsesBody, TemplateInput, TemplateRules, TemplateTraits,
};
use crate::dialect::{ContentFormat, PromptDialect};
use crate::error::{ModelLoadError, PromptError};
use crate::files::{ModelFiles, TemplateFile};
use crate::limits::PromptLimits;
use crate::prompt::TokenizedPrompt;
use crate::segment_cache::ModelSegmentCache;
use crate::segmented_text::{SegmentedText, SharedText, TextSegment, common_segments};
use crate::shared_parts::TextParts;
use crate::template::{ChatTemplate, MessagePlaces, TemplateTime, content_format};
use crate::template_probe;
use crate::tokenize::Tokenizer;
use crate::turn_cache::{ReadTurn, TemplateKind};

/// Converts requests for one model to token ids.
pub struct PromptTokenizer {
    engine: PromptDialect,
    template: Option<ModelTemplate>,
    tool_template: Option<ModelTemplate>,
    special_tokens: Vec<(String, Value)>,
    tokenizer: Tokenizer,
    bodies: ModelBodyCache,
    segments: ModelSegmentCache,
    /// See [`TemplateRules`].
    merges_systems: bool,
    effort_without_thinking: OnceLock<&'static str>,
    limits: PromptLimits,
}

/// The text of a chat with images, recordings or videos, for each of which the template rendered a placeholder.
#[derive(Debug, Clone)]
pub struct RenderedMediaChat {
    text: String,
    /// Bytes before the first placeholder.
    before: usize,
    add_special_tokens: bool,
}

/// The text of a chat.
pub(crate) struct ChatText {
    text: TextParts,
    /// Whether the tokenizer adds special tokens.
    special: bool,
    /// For the conversation's next turn; `None` if that is rendered from its beginning.
    turn: Option<ChatTurn>,
}

struct ChatTurn {
    template: TemplateKind,
    prepared: Vec<PreparedMessage>,
    places: Option<MessagePlaces>,
    /// The segments of the turn before with which this one begins.
    segments: Vec<TextSegment>,
}

struct ModelTemplate {
    compiled: ChatTemplate,
    format: ContentFormat,
    traits: TemplateTraits,
}

impl PromptTokenizer {
    /// Loads a model from a folder with its tokenizer.json, tokenizer_config.json and optional template files, and warms it up. Blocks
    /// for about a second; do not call it on an async thread.
    ///
    /// # Errors
    /// [`ModelLoadError`] with the invalid file and how to fix it.
    pub fn load(
        folder: &Path,
        engine: PromptDialect,
        limits: PromptLimits,
    ) -> Result<PromptTokenizer, ModelLoadError> {
        Self::load_with(folder, engine, limits, &PromptCaches::new(limits.cache_bytes))
    }

    /// As [`PromptTokenizer::load`], with caches shared with other models instead of [`PromptLimits::cache_bytes`].
    ///
    /// # Errors
    /// See [`PromptTokenizer::load`].
    pub fn load_with(
        folder: &Path,
        engine: PromptDialect,
        limits: PromptLimits,
        caches: &PromptCaches,
    ) -> Result<PromptTokenizer, ModelLoadError> {
        let files = ModelFiles::read(folder)?;
        let compile = |file: &Option<TemplateFile>| {
            file.as_ref().map(|file| ModelTemplate::compile(file, engine, limits.template_steps)).transpose()
        };
        let mut tokenizer = Tokenizer::load(&files)?;
        let bos = files.special_tokens.iter().find(|(name, _)| name == "bos_token");
        if let (PromptDialect::Sglang, true, Some((_, bos))) = (engine, files.configured_bos, bos) {
            tokenizer
                .set_text_prefix(bos)
                .map_err(|source| ModelLoadError::Tokenize { path: files.tokenizer.clone(), source })?;
        }
        let (bodies, segments) = caches.for_model();
        let variables = files.special_tokens.iter().cloned();
        let (template, tool_template) = (compile(&files.default_template)?, compile(&files.tool_template)?);
        Ok(PromptTokenizer {
            engine,
            merges_systems: template_probe::merges_systems(
                engine,
                template.as_ref().map(|model| &model.compiled),
                tool_template.as_ref().map(|model| &model.compiled),
            ),
            effort_without_thinking: OnceLock::new(),
            template,
            tool_template,
            special_tokens: variables.map(|(name, token)| (name, Value::from(token))).collect(),
            tokenizer,
            bodies,
            segments,
            limits,
        })
    }

    /// Whether every thread may tokenize short prompts: it takes microseconds, and half a megabyte for each thread that does it at a time.
    pub fn suits_every_thread(&self) -> bool {
        self.tokenizer.suits_every_thread()
    }

    /// Parses the body of a chat completion; for a later turn of a cached conversation only the new messages.
    ///
    /// # Errors
    /// See [`ChatBody::parse`].
    pub fn read_chat(&self, body: &[u8]) -> Result<ChatBody, PromptError> {
        self.bodies.read(body)
    }

    /// Parses the body of a request of `api`, and converts it to a chat as the engine does; for a later turn of a cached conversation,
    /// only the new messages are parsed.
    ///
    /// # Errors
    /// See [`ChatBody::parse`]. Also [`PromptError::EngineState`], [`PromptError::UnsupportedContent`] or
    /// [`PromptError::UnsupportedModel`] if the chat cannot be determined.
    pub fn read_conversation(&self, api: ConversationApi, body: &[u8]) -> Result<ChatBody, PromptError> {
        if api == ConversationApi::Chat {
            return self.read_chat(body);
        }
        if self.template.as_ref().is_some_and(|template| template_probe::is_harmony(&template.compiled)) {
            return Err(PromptError::UnsupportedModel("gpt-oss"));
        }
        let rules = TemplateRules {
            merges_systems: self.merges_systems,
            effort_without_thinking: &|| self.effort_without_thinking(),
        };
        if api == ConversationApi::Messages {
            self.bodies.read::<MessagesBody>(body)?.to_chat(self.engine, &rules)
        } else {
            self.bodies.read::<ResponsesBody>(body)?.to_chat(self.engine, &rules)
        }
    }

    fn effort_without_thinking(&self) -> &'static str {
        self.effort_without_thinking.get_or_init(|| {
            template_probe::effort_without_thinking(|effort| {
                let messages = template_probe::effort_test();
                let body =
                    ChatBody { messages, reasoning_effort: Some(Value::from(effort)), ..ChatBody::default() };
                self.render_chat(&body, TemplateTime::utc(0)).ok()
            })
        })
    }

    /// The token ids of a chat completion, before [`ChatBody::truncation`].
    ///
    /// # Errors
    /// [`PromptError`] if they cannot be determined.
    pub fn tokenize_chat(&self, body: &ChatBody, now: TemplateTime) -> Result<TokenizedPrompt, PromptError> {
        match (self.chat_text(body, now)?, &body.input_ids) {
            (Some(text), _) => self.segmented(text, body).into_prompt(&self.tokenizer, &self.segments),
            (None, ids) => Ok(TokenizedPrompt::of_ids(ids.clone().unwrap_or_default())),
        }
    }

    /// The text of a chat completion; `None` if the engine uses the body's token ids.
    pub(crate) fn chat_text(
        &self,
        body: &ChatBody,
        now: TemplateTime,
    ) -> Result<Option<ChatText>, PromptError> {
        let has_ids = self.engine == PromptDialect::Sglang && body.input_ids.is_some();
        if has_ids { Ok(None) } else { self.rendered(body, now).map(Some) }
    }

    /// Divides the text of a chat into segments, and keeps the turn for the next one.
    pub(crate) fn segmented(&self, chat: ChatText, body: &ChatBody) -> SegmentedText<'static> {
        let ChatText { text, special, turn } = chat;
        let shared = SharedText::Parts(text.clone());
        let Some(ChatTurn { template, prepared, places, segments }) = turn else {
            return SegmentedText::new(shared, special, &self.tokenizer, &self.segments);
        };
        let segmented = SegmentedText::continued(shared, special, &segments, &self.tokenizer, &self.segments);
        if let Some(own) = body.history.own() {
            let segments = segmented.segments().to_vec();
            // A second reader of the same body has the same results.
            let _ = own.set(ReadTurn { template, prepared, text, places, segments });
        }
        segmented
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub(crate) fn segments(&self) -> &ModelSegmentCache {
        &self.segments
    }

    /// Renders a chat with images, recordings or videos.
    ///
    /// # Errors
    /// [`PromptError::Multimodal`] if the template does not render media where they are in the message.
    pub fn render_media_chat(
        &self,
        body: &ChatBody,
        now: TemplateTime,
    ) -> Result<RenderedMediaChat, PromptError> {
        let unknown = || PromptError::Multimodal("media".to_owned());
        let (ModelTemplate { compiled, format, traits }, _) = self.template_for(body)?;
        if *format != ContentFormat::Parts {
            return Err(unknown());
        }
        let body = chat::with_placeholders(body)?;
        let mut conversation = chat::prepare(self.engine, *format, *traits, &body, &[])?;
        let without_media = self.render(compiled, &conversation, now, body.bytes)?;
        conversation.messages = chat::with_media(&conversation.messages)?;
        // A template may also treat a message with media in another way from its start.
        let text = self.render(compiled, &conversation, now, body.bytes)?;
        let before = chat::common_text(&text, &without_media).ok_or_else(unknown)?.len();
        let text = finished(text, &conversation)?;
        Ok(RenderedMediaChat {
            before: before.min(text.len()),
            text,
            add_special_tokens: conversation.add_special_tokens,
        })
    }

    /// The token ids of a chat as rendered, with the few that the template renders for each medium. An engine replaces these by others.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] if the text cannot be tokenized.
    pub fn tokenize_media_chat(&self, chat: &RenderedMediaChat) -> Result<TokenizedPrompt, PromptError> {
        self.segments.tokens(&self.tokenizer, &chat.text, chat.add_special_tokens)
    }

    /// The token ids before the first image, recording or video; their blocks have the same hashes as those of text. The complete
    /// prompt is longer.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] if the text cannot be tokenized.
    pub fn tokenize_before_media(&self, chat: &RenderedMediaChat) -> Result<TokenizedPrompt, PromptError> {
        let before = chat.text.get(..chat.before).unwrap_or_default();
        self.segments.tokens(&self.tokenizer, before, chat.add_special_tokens)
    }

    /// The text that the engine renders from a chat completion's messages.
    ///
    /// # Errors
    /// [`PromptError`] if it cannot be determined.
    pub fn render_chat(&self, body: &ChatBody, now: TemplateTime) -> Result<String, PromptError> {
        self.rendered(body, now).map(|chat| chat.text.slice(0..chat.text.len()).into_owned())
    }

    /// The token ids of a completion's prompt, before [`crate::TextBody::truncation`]. `special` as in [`crate::TextBody::add_special_tokens`].
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] if the text cannot be tokenized.
    pub fn tokenize_text(&self, prompt: &TextPrompt, special: bool) -> Result<TokenizedPrompt, PromptError> {
        match prompt {
            TextPrompt::Ids(ids) => Ok(TokenizedPrompt::of_ids(ids.clone())),
            TextPrompt::Text(text) => self.segments.tokens(&self.tokenizer, text, special),
        }
    }

    fn template_for(&self, body: &ChatBody) -> Result<(&ModelTemplate, TemplateKind), PromptError> {
        // Another API's empty list of tools is one to the engine too.
        let is_chat = body.api == ConversationApi::Chat;
        let tools = body.tools.as_ref().is_some_and(|tools| !(is_chat && tools.is_empty()));
        let for_tools =
            self.tool_template.as_ref().filter(|_| tools).map(|template| (template, TemplateKind::Tools));
        let default = self.template.as_ref().map(|template| (template, TemplateKind::Default));
        for_tools.or(default).ok_or(PromptError::NoTemplate)
    }

    fn rendered(&self, body: &ChatBody, now: TemplateTime) -> Result<ChatText, PromptError> {
        let (template, kind) = self.template_for(body)?;
        let earlier = body.history.earlier(kind);
        let known = earlier.map_or(&[][..], |(turn, known)| &turn.prepared[..known]);
        let mut conversation = chat::prepare(self.engine, template.format, template.traits, body, known)?;
        if body.history.own().is_some()
            && let Some(chat) = self.rendered_turn(template, kind, &mut conversation, body, now)
        {
            return Ok(chat);
        }
        let compiled = &template.compiled;
        let mut rendered = self.render(compiled, &conversation, now, body.bytes);
        if let (PromptDialect::Sglang, Err(PromptError::Template(_)), Some(tools)) =
            (self.engine, &rendered, &mut conversation.tools)
        {
            // SGLang retries with the bare functions.
            for tool in tools {
                if let Ok(function) = tool.get_attr("function") {
                    *tool = function;
                }
            }
            rendered = self.render(compiled, &conversation, now, body.bytes);
        }
        let text = TextParts::new(finished(rendered?, &conversation)?);
        Ok(ChatText { text, special: conversation.add_special_tokens, turn: None })
    }

    /// The text of a turn that is kept for the next one, of which only what the turn before lacks is rendered. `None` if it is to be
    /// rendered in another way.
    fn rendered_turn(
        &self,
        template: &ModelTemplate,
        kind: TemplateKind,
        conversation: &mut TemplateInput,
        body: &ChatBody,
        now: TemplateTime,
    ) -> Option<ChatText> {
        if !conversation.is_in_order || conversation.continuation.is_some() || conversation.suffix.is_some() {
            return None;
        }
        let earlier =
            body.history.earlier(kind).and_then(|(turn, known)| Some((turn, turn.places.as_ref()?, known)));
        let places = earlier.map(|(turn, places, known)| (&turn.text, places, known));
        let variables = self.variables(conversation);
        let sizes = [body.bytes, self.limits.prompt_bytes];
        let turn = template.compiled.render_turn(&variables, &conversation.messages, places, now, sizes)?;
        let (text, segments) = match earlier {
            Some((earlier, ..)) if turn.shared > 0 => {
                // No segment is to cross a part of the text.
                let segments = common_segments(&earlier.segments, turn.shared);
                let end = segments.last().map_or(0, |last| last.end);
                let rest = earlier.text.slice(end..turn.shared).into_owned() + &turn.rest;
                (earlier.text.with_rest(end, rest), segments.to_vec())
            }
            _ => (TextParts::new(turn.rest), Vec::new()),
        };
        let prepared = std::mem::take(&mut conversation.prepared);
        let turn = ChatTurn { template: kind, prepared, places: Some(turn.places), segments };
        Some(ChatText { text, special: conversation.add_special_tokens, turn: Some(turn) })
    }

    fn render(
        &self,
        template: &ChatTemplate,
        conversation: &TemplateInput,
        now: TemplateTime,
        about_bytes: usize,
    ) -> Result<String, PromptError> {
        let mut variables = self.variables(conversation);
        variables.push(("messages".to_owned(), Value::from(conversation.messages.clone())));
        template.render(variables, now, about_bytes, self.limits.prompt_bytes)
    }

    /// The variables of the template, besides the messages.
    fn variables(&self, conversation: &TemplateInput) -> Vec<(String, Value)> {
        let tools = conversation.tools.as_ref().map_or(Value::from(()), |tools| Value::from(tools.clone()));
        let mut variables = self.special_tokens.clone();
        variables.extend(conversation.variables.iter().cloned());
        variables.extend([
            ("tools".to_owned(), tools),
            ("documents".to_owned(), conversation.documents.clone()),
            ("add_generation_prompt".to_owned(), Value::from(conversation.add_generation_prompt)),
        ]);
        variables
    }
}

/// The rendered text as engines complete it.
fn finished(mut text: String, conversation: &TemplateInput) -> Result<String, PromptError> {
    if let Some(continuation) = &conversation.continuation {
        text = chat::cut(text, continuation)?;
    }
    if let Some(suffix) = &conversation.suffix {
        text.push_str(suffix);
    }
    Ok(text)
}

impl ModelTemplate {
    fn compile(
        file: &TemplateFile,
        engine: PromptDialect,
        steps: u64,
    ) -> Result<ModelTemplate, ModelLoadError> {
        let compiled = ChatTemplate::compile(&file.source, steps)
            .map_err(|source| ModelLoadError::Template { path: file.path.clone(), source })?;
        let (format, traits) = (content_format(engine, &file.source), TemplateTraits::of(&file.source));
        Ok(ModelTemplate { compiled, format, traits })
    }
}

impl std::fmt::Debug for PromptTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("engine", &self.engine)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
