//! A model: its templates, its tokenizer, and the conversations seen.

use std::path::Path;

use minijinja::Value;

use crate::bodies::Bodies;
use crate::body::{ChatBody, TextPrompt};
use crate::caches::PromptCaches;
use crate::chat::{self, Conversation};
use crate::conversation::Conversations;
use crate::engine::{ContentFormat, Engine};
use crate::error::{LoadError, Unpredictable};
use crate::files::{ModelFiles, TemplateFile};
use crate::prompt::Prompt;
use crate::template::{ChatTemplate, Now, content_format};
use crate::tokenize::Tokenizer;

/// What a model may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Steps of the template engine per prompt. A conversation of a thousand messages takes some hundred thousand.
    pub template_steps: u64,
    /// Bytes of a rendered prompt.
    pub prompt_bytes: usize,
    /// Bytes of conversations kept: half of them for prompts, half for bodies.
    pub conversation_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { template_steps: 10_000_000, prompt_bytes: 64 << 20, conversation_bytes: 256 << 20 }
    }
}

/// A model whose prompts can be predicted. `S` is what the caller keeps with each conversation, for example the states of a chain of
/// hashes; clones of it should be cheap.
pub struct Model<S = ()> {
    engine: Engine,
    template: Option<Template>,
    tool_template: Option<Template>,
    special_tokens: Vec<(String, Value)>,
    tokenizer: Tokenizer,
    bodies: Bodies,
    conversations: Conversations<S>,
    limits: Limits,
}

struct Template {
    compiled: ChatTemplate,
    format: ContentFormat,
}

impl<S: Clone + Send + Sync + 'static> Model<S> {
    /// Loads a model from a folder with its tokenizer.json, tokenizer_config.json and, if it has them, template files, and warms it
    /// up. Blocks for about a second; call it where that does no harm.
    ///
    /// # Errors
    /// [`LoadError`] with the file at fault and how to mend it.
    pub fn load(folder: &Path, engine: Engine, limits: Limits) -> Result<Model<S>, LoadError> {
        Self::load_with(folder, engine, limits, &PromptCaches::new(limits.conversation_bytes))
    }

    /// The same with caches that other models use too, in the place of [`Limits::conversation_bytes`].
    ///
    /// # Errors
    /// As of [`Model::load`].
    pub fn load_with(
        folder: &Path,
        engine: Engine,
        limits: Limits,
        caches: &PromptCaches<S>,
    ) -> Result<Model<S>, LoadError> {
        let files = ModelFiles::read(folder)?;
        let compile = |file: &Option<TemplateFile>| {
            file.as_ref().map(|file| Template::compile(file, engine, limits.template_steps)).transpose()
        };
        let mut tokenizer = Tokenizer::load(&files)?;
        let bos = files.special_tokens.iter().find(|(name, _)| name == "bos_token");
        if let (Engine::Sglang, true, Some((_, bos))) = (engine, files.configured_bos, bos) {
            tokenizer.begin_texts_with(bos).map_err(|error| LoadError::Tokenizer {
                path: files.tokenizer.clone(),
                problem: error.to_string(),
            })?;
        }
        let (bodies, conversations) = caches.of_one_model();
        let variables = files.special_tokens.iter().cloned();
        Ok(Model {
            engine,
            template: compile(&files.default_template)?,
            tool_template: compile(&files.tool_template)?,
            special_tokens: variables.map(|(name, token)| (name, Value::from(token))).collect(),
            tokenizer,
            bodies,
            conversations,
            limits,
        })
    }

    /// Reads the body of a chat completion, of a later turn its new messages only.
    ///
    /// # Errors
    /// As [`ChatBody::parse`].
    pub fn read_chat(&self, body: &[u8]) -> Result<ChatBody, Unpredictable> {
        self.bodies.read(body)
    }

    /// The tokens that the engine will make of a chat completion.
    ///
    /// # Errors
    /// [`Unpredictable`] if they cannot be told.
    pub fn tokens_of_chat(&self, body: &ChatBody, now: Now) -> Result<Prompt<S>, Unpredictable> {
        if let (Engine::Sglang, Some(ids)) = (self.engine, &body.input_ids) {
            return Ok(Prompt::of_ids(ids.clone()));
        }
        let (text, special) = self.rendered(body, now)?;
        self.conversations.tokens(&self.tokenizer, &text, special)
    }

    /// The text that the engine will make of a chat completion's messages.
    ///
    /// # Errors
    /// [`Unpredictable`] if it cannot be told.
    pub fn text_of_chat(&self, body: &ChatBody, now: Now) -> Result<String, Unpredictable> {
        self.rendered(body, now).map(|(text, _)| text)
    }

    /// The tokens of a completion's prompt. `special` as in [`crate::TextBody::add_special_tokens`].
    ///
    /// # Errors
    /// [`Unpredictable::Tokenizer`] if the text cannot be tokenised.
    pub fn tokens_of_text(&self, prompt: &TextPrompt, special: bool) -> Result<Prompt<S>, Unpredictable> {
        match prompt {
            TextPrompt::Ids(ids) => Ok(Prompt::of_ids(ids.clone())),
            TextPrompt::Text(text) => self.conversations.tokens(&self.tokenizer, text, special),
        }
    }

    /// Keeps a prompt, so that a later one that begins with it costs its new text only. `slot` comes back with that one.
    pub fn remember(&self, prompt: &Prompt<S>, slot: S) {
        self.conversations.remember(prompt, slot);
    }

    fn rendered(&self, body: &ChatBody, now: Now) -> Result<(String, bool), Unpredictable> {
        let tools = body.tools.as_ref().is_some_and(|tools| !tools.is_empty());
        let template = self.tool_template.as_ref().filter(|_| tools).or(self.template.as_ref());
        let Template { compiled, format } = template.ok_or(Unpredictable::NoTemplate)?;
        let mut conversation = chat::prepare(self.engine, *format, compiled.source(), body)?;
        let mut rendered = self.render(compiled, &conversation, now, body.bytes);
        if let (Engine::Sglang, Err(Unpredictable::Template(_)), Some(tools)) =
            (self.engine, &rendered, &mut conversation.tools)
        {
            // SGLang tries once more with the functions themselves.
            for tool in tools {
                if let Ok(function) = tool.get_attr("function") {
                    *tool = function;
                }
            }
            rendered = self.render(compiled, &conversation, now, body.bytes);
        }
        let mut text = rendered?;
        if let Some(continuation) = &conversation.continuation {
            text = chat::cut(text, continuation)?;
        }
        if let Some(suffix) = &conversation.suffix {
            text.push_str(suffix);
        }
        Ok((text, conversation.add_special_tokens))
    }

    fn render(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        now: Now,
        about_bytes: usize,
    ) -> Result<String, Unpredictable> {
        let tools = conversation.tools.as_ref().map_or(Value::from(()), |tools| Value::from(tools.clone()));
        let mut variables = self.special_tokens.clone();
        variables.extend(conversation.variables.iter().cloned());
        variables.extend([
            ("messages".to_owned(), Value::from(conversation.messages.clone())),
            ("tools".to_owned(), tools),
            ("documents".to_owned(), conversation.documents.clone()),
            ("add_generation_prompt".to_owned(), Value::from(conversation.add_generation_prompt)),
        ]);
        template.render(variables, now, about_bytes, self.limits.prompt_bytes)
    }
}

impl Template {
    fn compile(file: &TemplateFile, engine: Engine, steps: u64) -> Result<Template, LoadError> {
        let compiled = ChatTemplate::compile(&file.source, steps)
            .map_err(|error| LoadError::Template { path: file.path.clone(), problem: error.to_string() })?;
        Ok(Template { format: content_format(engine, &file.source), compiled })
    }
}

impl<S> std::fmt::Debug for Model<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("engine", &self.engine)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
