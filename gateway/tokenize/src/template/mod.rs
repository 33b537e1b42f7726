//! Renders chat templates as transformers' `apply_chat_template` does.

mod clock;
mod concatenation;
mod format;
mod generation;
mod json;
mod message_loop;
mod python;
mod tags;
mod turns;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

pub use clock::TemplateTime;
pub(crate) use format::content_format;
pub(crate) use turns::{MessagePlaces, RenderedTurn};

use crate::error::PromptError;
use crate::limits::PromptLimits;
use crate::shared_parts::TextParts;
use concatenation::{TEXT_FILTER, without_concatenations};
use message_loop::{MessageLoop, WINDOW};
use turns::{EarlierTurn, MessageWindow};

const NAME: &str = "chat";
/// The template that renders a window of the messages.
const TURN_NAME: &str = "turn";
const MESSAGES: &str = "messages";
/// Maximum size of a rendered probe. Real ones have less than a kilobyte, most of it the template's own text.
const MAX_PROBE_BYTES: usize = 1 << 20;

/// A compiled template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    /// How later turns are rendered; `None` if that needs all messages.
    message_loop: Option<Arc<MessageLoop>>,
}

impl ChatTemplate {
    /// Compiles `source`. `steps` limits every rendering.
    ///
    /// # Errors
    /// The error of the template engine, with the line.
    pub(crate) fn compile(source: &str, steps: u64) -> Result<ChatTemplate, Error> {
        let mut env = Environment::new();
        // As transformers: without these settings every block leaves its newline in the prompt.
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(python::method);
        env.set_fuel(Some(steps));
        env.add_filter("tojson", json::tojson);
        env.add_function("raise_exception", raise_exception);
        // In Jinja strings and mappings are sequences too, and templates use this test.
        env.add_test("sequence", python::is_sequence);
        env.add_filter(TEXT_FILTER, concatenation_part);
        let plain = without_concatenations(&generation::without_tags(source));
        let message_loop = MessageLoop::find(&plain).map(Arc::new);
        env.add_template_owned(NAME, plain)?;
        let message_loop = message_loop
            .filter(|rewritten| env.add_template_owned(TURN_NAME, rewritten.source.clone()).is_ok());
        Ok(ChatTemplate { env, source: source.to_owned(), message_loop })
    }

    /// The source text of the template.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages as engines test a template at their start: without the variables and functions that only rendering a request
    /// provides. `None` if the template fails.
    pub(crate) fn probe(&self, messages: &[Value]) -> Option<String> {
        // The engines' own test does not know the tag.
        if self.source != generation::without_tags(&self.source) {
            return None;
        }
        let mut env = self.env.clone();
        env.remove_global("raise_exception");
        let variables =
            [(MESSAGES, Value::from(messages.to_vec())), ("add_generation_prompt", Value::from(false))];
        render_bounded(&env, NAME, Value::from_pairs(variables), BoundedOutput::new(0, MAX_PROBE_BYTES)).ok()
    }

    /// Renders with `variables`; `about_bytes` is the expected and `most_bytes` the maximum size of the text.
    ///
    /// # Errors
    /// [`PromptError::Template`] when the template fails or raises an exception, [`PromptError::TemplateLimit`] when it exceeds a limit.
    pub(crate) fn render(
        &self,
        variables: Vec<(String, Value)>,
        now: TemplateTime,
        about_bytes: usize,
        most_bytes: usize,
    ) -> Result<String, PromptError> {
        let variables = variables.into_iter().chain([clock(now)]);
        render_bounded(
            &self.env,
            NAME,
            Value::from_pairs(variables),
            BoundedOutput::new(about_bytes, most_bytes),
        )
    }

    /// Renders a turn of a conversation, of whose earlier turn `earlier` is the text, with the places of its messages and how many of
    /// them this turn begins with. Only the other messages are rendered. `None` if the template needs all messages, or fails: then
    /// [`ChatTemplate::render`] gives the result.
    pub(crate) fn render_turn(
        &self,
        variables: &[(String, Value)],
        messages: &[Value],
        earlier: Option<(&TextParts, &MessagePlaces, usize)>,
        now: TemplateTime,
        [about_bytes, most_bytes]: [usize; 2],
    ) -> Option<RenderedTurn> {
        let message_loop = self.message_loop.as_ref()?;
        let render = |earlier: Option<EarlierTurn<'_>>| {
            let about_bytes = if earlier.is_some() { 0 } else { about_bytes };
            let output = BoundedOutput::new(about_bytes, most_bytes);
            let window = MessageWindow::new(message_loop, messages, earlier.as_ref(), output.written.clone());
            let window = Arc::new(window);
            let own = [
                clock(now),
                (MESSAGES.to_owned(), Value::from(messages.to_vec())),
                (WINDOW.to_owned(), Value::from_dyn_object(window.clone())),
            ];
            let variables = Value::from_pairs(variables.iter().cloned().chain(own));
            let text = render_bounded(&self.env, TURN_NAME, variables, output).ok()?;
            window.finish(text, earlier.as_ref()).filter(|turn| turn.shared + turn.rest.len() <= most_bytes)
        };
        let earlier = earlier.map(|(text, places, known)| EarlierTurn { text, places, known });
        earlier.and_then(|earlier| render(Some(earlier))).or_else(|| render(None))
    }
}

/// The function with which templates print the time.
fn clock(now: TemplateTime) -> (String, Value) {
    ("strftime_now".to_owned(), Value::from_function(move |format: String| now.strftime(&format)))
}

fn render_bounded(
    env: &Environment<'_>,
    name: &str,
    variables: Value,
    mut page: BoundedOutput,
) -> Result<String, PromptError> {
    let rendered = env
        .get_template(name)
        .and_then(|template| template.render_captured_to(variables, &mut page).map(drop));
    match rendered {
        Ok(()) => String::from_utf8(page.text).map_err(|error| PromptError::Template(error.to_string())),
        Err(_) if page.truncated => Err(PromptError::TemplateLimit("output")),
        Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(PromptError::TemplateLimit("steps")),
        Err(error) => Err(PromptError::Template(error.to_string())),
    }
}

/// Compiles and renders a template with `messages`, which is JSON: for fuzzing templates, which otherwise come from a model's folder.
///
/// # Errors
/// [`PromptError`] if the template does not compile, fails, or exceeds a limit.
pub fn render_template(source: &str, messages: &str, limits: PromptLimits) -> Result<String, PromptError> {
    let failed = |error: Error| PromptError::Template(error.to_string());
    let template = ChatTemplate::compile(source, limits.template_steps).map_err(failed)?;
    let messages: Value =
        serde_json::from_str(messages).map_err(|error| PromptError::Malformed(error.to_string()))?;
    let variables = vec![("messages".to_owned(), messages)];
    template.render(variables, TemplateTime::utc(0), source.len(), limits.prompt_bytes)
}

/// The function with which templates reject a conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// A part of a concatenation that is printed: fails for anything but a text.
fn concatenation_part(value: Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        return Ok(value);
    }
    let problem = format!("a text and a value of type {} cannot be concatenated", value.kind());
    Err(Error::new(ErrorKind::InvalidOperation, problem))
}

/// Bytes that one `memcpy` copies to the rendered text. Older versions of glibc copy 4 KiB and more with `rep movsb`, which Zen 3
/// executes at 4 GB/s if the destination is not aligned (<https://lunnova.dev/articles/ryzen-slow-short-rep-mov/>).
const COPIED_AT_ONCE: usize = 2048;

/// The rendered text, with a size limit.
struct BoundedOutput {
    text: Vec<u8>,
    max_bytes: usize,
    truncated: bool,
    /// Size of the text, for the functions of the template.
    written: Arc<AtomicUsize>,
}

impl BoundedOutput {
    fn new(about_bytes: usize, max_bytes: usize) -> BoundedOutput {
        BoundedOutput {
            text: Vec::with_capacity(about_bytes.min(max_bytes)),
            max_bytes,
            truncated: false,
            written: Arc::default(),
        }
    }
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.max_bytes {
            self.truncated = true;
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        bytes.chunks(COPIED_AT_ONCE).for_each(|piece| self.text.extend_from_slice(piece));
        self.written.store(self.text.len(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, variables: &[(&str, Value)]) -> Result<String, PromptError> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        ChatTemplate::compile(source, 100_000).unwrap().render(variables, TemplateTime::utc(0), 10, 1000)
    }

    #[test]
    fn blocks_leave_no_space_and_loops_support_continue() {
        let source = "a\n  {% for x in [1, 2, 3] %}\n{% if x == 2 %}{% continue %}{% endif %}\n{{ x }}\n  {% endfor %}\nb\n";
        assert_eq!(render(source, &[]).unwrap(), "a\n1\n3\nb");
    }

    #[test]
    fn values_print_as_in_python() {
        let source = "{{ true }} {{ none }} {{ 1.0 }} {{ missing }}|{{ 'x' is sequence }} {{ {} is sequence }} {{ 1 is sequence }}";
        assert_eq!(render(source, &[]).unwrap(), "True None 1.0 |True True False");
    }

    #[test]
    fn a_raised_exception_is_the_reason() {
        let refused = render("{{ raise_exception('roles must alternate') }}", &[]);
        assert!(
            matches!(refused, Err(PromptError::Template(reason)) if reason.contains("roles must alternate"))
        );
    }

    #[test]
    fn an_endless_template_is_stopped() {
        let endless = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}";
        assert_eq!(render(endless, &[]), Err(PromptError::TemplateLimit("steps")));
        let wide = "{% for a in range(1000) %}aaaaaaaaaa{% endfor %}";
        assert_eq!(render(wide, &[]), Err(PromptError::TemplateLimit("output")));
        assert!(render("{{ missing.a.b }}", &[]).is_err());
    }

    #[test]
    fn the_time_is_passed_by_the_caller() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &[]).unwrap(), "01 Jan 1970");
        assert!(matches!(render("{{ strftime_now('%Q') }}", &[]), Err(PromptError::Template(_))));
    }

    #[test]
    fn generation_tags_do_not_change_the_text() {
        let source = "{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}";
        assert_eq!(render(source, &[]).unwrap(), "aFalse");
    }
}
