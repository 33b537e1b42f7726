//! `multipart/form-data` (RFC 7578): the model that a form names, and the form without the fields that steer KV transfer. Engines
//! accept audio and images in this format, with parameters in other fields, and parse some fields as JSON (vLLM's `vllm_xargs`).
//!
//! Form parsers differ in which malformed input they accept. This one accepts none: unusual syntax is rejected, so that an engine
//! cannot find a field in a form that the gateway has not found.

use std::collections::BTreeSet;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use http::HeaderValue;
use memchr::memmem;

use crate::request_body::{MemberSearchError, is_transfer_member, without_transfer_members};

/// Longest boundary that RFC 2046 allows.
const MAX_BOUNDARY_LEN: usize = 70;
/// Most fields in one form.
const MAX_FIELDS: usize = 1024;
/// Longest name of a model in bytes.
const MAX_MODEL_LEN: usize = 1024;
/// Most headers of one field.
const MAX_FIELD_HEADERS: usize = 8;

/// Why a form is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum FormDataError {
    #[error("the content type has no boundary, or one that RFC 2046 does not allow")]
    Boundary,
    #[error("the form does not begin and end with its boundary; send it as RFC 7578 requires")]
    Framing,
    #[error("the form has more than {MAX_FIELDS} fields")]
    TooManyFields,
    #[error(
        "a field's headers are invalid: one `Content-Disposition: form-data; name=\"…\"` without escapes is required"
    )]
    FieldHeaders,
    #[error("a field nests deeper than 127 levels; flatten it")]
    TooDeep,
    /// Form parsers differ in which of several fields they use.
    #[error("the form has more than one field `model`; send it once")]
    SeveralModels,
    #[error(
        "the form's field `model` must be the name of a model: a text of at most {MAX_MODEL_LEN} bytes, not a file"
    )]
    InvalidModel,
}

impl FormDataError {
    /// The invalid field, if it is a known one.
    pub(super) fn field(self) -> Option<&'static str> {
        matches!(self, Self::SeveralModels | Self::InvalidModel).then_some("model")
    }
}

/// A form whose fields were checked.
#[derive(Debug, PartialEq)]
pub(super) struct FormContent {
    pub(super) body: Bytes,
    /// Whether any field was removed or changed.
    pub(super) stripped: bool,
    /// Byte range in `body` of the value of the field `model`, which is UTF-8.
    pub(super) model: Option<Range<usize>>,
}

impl FormContent {
    /// Reads `body`, and removes the fields that steer KV transfer. Other bytes are unchanged.
    pub(super) fn read(content_type: &HeaderValue, body: Bytes) -> Result<Self, FormDataError> {
        let boundary = content_type.to_str().ok().and_then(boundary).ok_or(FormDataError::Boundary)?;
        let (body, stripped) = without_transfer_fields(boundary, body)?;
        let model = model_field(&body, boundary)?;
        Ok(Self { body, stripped, model })
    }

    /// The requested model.
    pub(super) fn model_name(&self) -> Option<&str> {
        std::str::from_utf8(self.body.get(self.model.clone()?)?).ok()
    }
}

/// The value of the only field `model`.
fn model_field(body: &Bytes, boundary: &str) -> Result<Option<Range<usize>>, FormDataError> {
    let mut found = None;
    for field in split(body, boundary)? {
        let (head, value) = field_parts(&field)?;
        if head.name != "model" {
            continue;
        }
        if found.is_some() {
            return Err(FormDataError::SeveralModels);
        }
        if head.is_file || value.len() > MAX_MODEL_LEN || std::str::from_utf8(&value).is_err() {
            return Err(FormDataError::InvalidModel);
        }
        let start = value.as_ptr().addr() - body.as_ptr().addr();
        found = Some(start..start + value.len());
    }
    Ok(found)
}

/// Returns `body` without those fields; the others are unchanged. The flag says whether any field was removed.
fn without_transfer_fields(boundary: &str, body: Bytes) -> Result<(Bytes, bool), FormDataError> {
    let fields = split(&body, boundary)?;
    let mut sanitized = Vec::with_capacity(fields.len());
    let mut changed = false;
    for field in fields {
        let after = strip_field(&field)?;
        changed |= after.as_ref() != Some(&field);
        sanitized.extend(after);
    }
    if !changed {
        return Ok((body, false));
    }
    let mut form = BytesMut::with_capacity(body.len());
    for field in &sanitized {
        form.extend_from_slice(format!("--{boundary}\r\n").as_bytes());
        form.extend_from_slice(field);
        form.extend_from_slice(b"\r\n");
    }
    form.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
    Ok((form.freeze(), true))
}

/// One field of a form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FormField {
    pub(super) name: String,
    /// `None` for a field that is not a file, or a file without a plain name.
    pub(super) filename: Option<String>,
    pub(super) value: Bytes,
}

/// All fields of a form, in their order.
pub(super) fn form_fields(content_type: &HeaderValue, body: &Bytes) -> Result<Vec<FormField>, FormDataError> {
    let boundary = content_type.to_str().ok().and_then(boundary).ok_or(FormDataError::Boundary)?;
    let fields = split(body, boundary)?;
    fields
        .iter()
        .map(|field| {
            let (disposition, value) = field_parts(field)?;
            let filename = disposition.filename.map(str::to_owned);
            Ok(FormField { name: disposition.name.to_owned(), filename, value })
        })
        .collect()
}

/// The parameter `boundary` of a content type, if there is exactly one.
fn boundary(content_type: &str) -> Option<&str> {
    let mut found = None;
    for parameter in content_type.split(';').skip(1) {
        let (name, value) = parameter.trim().split_once('=')?;
        if name.eq_ignore_ascii_case("boundary") && found.replace(value).is_some() {
            return None;
        }
    }
    let value = found?;
    let value = value.strip_prefix('"').map_or(Some(value), |value| value.strip_suffix('"'))?;
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=?".contains(&byte);
    ((1..=MAX_BOUNDARY_LEN).contains(&value.len()) && value.bytes().all(allowed)).then_some(value)
}

/// Splits a form into its fields, each with its headers.
fn split(body: &Bytes, boundary: &str) -> Result<Vec<Bytes>, FormDataError> {
    let opening = format!("--{boundary}");
    let delimiter = format!("\r\n--{boundary}");
    let mut offset = opening.len();
    if !body.starts_with(opening.as_bytes()) {
        return Err(FormDataError::Framing);
    }
    let finder = memmem::Finder::new(delimiter.as_bytes());
    let mut fields = Vec::new();
    loop {
        let rest = &body[offset..];
        if matches!(rest, b"--" | b"--\r\n") {
            return Ok(fields);
        }
        if !rest.starts_with(b"\r\n") {
            return Err(FormDataError::Framing);
        }
        if fields.len() == MAX_FIELDS {
            return Err(FormDataError::TooManyFields);
        }
        offset += 2;
        let end = offset + finder.find(&body[offset..]).ok_or(FormDataError::Framing)?;
        fields.push(body.slice(offset..end));
        offset = end + delimiter.len();
    }
}

/// A field's disposition and value.
fn field_parts(field: &Bytes) -> Result<(FieldDisposition<'_>, Bytes), FormDataError> {
    let end = memmem::find(field, b"\r\n\r\n").ok_or(FormDataError::FieldHeaders)?;
    let head = std::str::from_utf8(&field[..end]).map_err(|_| FormDataError::FieldHeaders)?;
    let disposition = disposition(head).ok_or(FormDataError::FieldHeaders)?;
    Ok((disposition, field.slice(end + 4..)))
}

/// The sanitized field; `None` if it must be removed.
fn strip_field(field: &Bytes) -> Result<Option<Bytes>, FormDataError> {
    let (head, value) = field_parts(field)?;
    // Some frameworks parse `a[b]` and `a.b` as one field.
    if head.name.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(is_transfer_member) {
        return Ok(None);
    }
    if head.is_file || !matches!(value.trim_ascii_start().first(), Some(b'{' | b'[')) {
        return Ok(Some(field.clone()));
    }
    match without_transfer_members(value.clone()) {
        Ok(cleaned) if cleaned == value => Ok(Some(field.clone())),
        Ok(cleaned) => {
            let head = &field[..field.len() - value.len()];
            Ok(Some(Bytes::from([head, &cleaned].concat())))
        }
        Err(MemberSearchError::TooDeep) => Err(FormDataError::TooDeep),
        // A prompt may begin with a brace. No engine parses parameters from a text that is not JSON.
        Err(MemberSearchError::NotJson) => Ok(Some(field.clone())),
    }
}

/// What `Content-Disposition` says about a field.
struct FieldDisposition<'a> {
    name: &'a str,
    filename: Option<&'a str>,
    is_file: bool,
}

fn disposition(head: &str) -> Option<FieldDisposition<'_>> {
    let mut found = None;
    for (count, line) in head.split("\r\n").enumerate() {
        let (name, value) = line.split_once(':')?;
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let is_valid = !name.is_empty()
            && name.bytes().all(is_token)
            && !value.contains(|c: char| c.is_control() && c != '\t');
        if count >= MAX_FIELD_HEADERS || !is_valid {
            return None;
        }
        if name.eq_ignore_ascii_case("content-disposition") && found.replace(value).is_some() {
            return None;
        }
        // Some parsers in engines ignore this header and others follow it: they would read another value than the gateway.
        if name.eq_ignore_ascii_case("content-transfer-encoding")
            && !["binary", "8bit", "7bit"].iter().any(|plain| value.trim().eq_ignore_ascii_case(plain))
        {
            return None;
        }
    }
    let mut rest = found?.trim().strip_prefix("form-data")?.trim_start();
    let (mut name, mut filename, mut parameters) = (None, None, BTreeSet::new());
    while !rest.is_empty() {
        let (parameter, value) = rest.strip_prefix(';')?.trim_start().split_once('=')?;
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => value.split_at(value.find([';', ' ']).unwrap_or(value.len())),
        };
        if value.contains(['\\', '"'])
            || !matches!(parameter, "name" | "filename" | "filename*")
            || !parameters.insert(parameter)
        {
            return None;
        }
        match parameter {
            "name" => name = Some(value),
            "filename" => filename = Some(value),
            _ => {}
        }
        rest = after.trim_start();
    }
    Some(FieldDisposition { name: name?, filename, is_file: parameters.len() > 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: HeaderValue = HeaderValue::from_static("multipart/form-data; boundary=b0");

    fn form(fields: &[&str]) -> Bytes {
        let fields: String = fields.iter().map(|field| format!("--b0\r\n{field}\r\n")).collect();
        Bytes::from(format!("{fields}--b0--\r\n"))
    }

    fn sanitized(content_type: &HeaderValue, body: Bytes) -> Result<(Bytes, bool), FormDataError> {
        FormContent::read(content_type, body).map(|form| (form.body, form.stripped))
    }

    fn text(name: &str, value: &str) -> String {
        format!("Content-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}")
    }

    #[test]
    fn transfer_fields_are_removed_and_others_stay() {
        let file = "content-disposition: form-data; name=\"file\"; filename=\"a b.wav\"\r\nContent-Type: audio/wav\r\n\r\n{\"kv_hints\":1}\0\r\n--b\r\n";
        let model = text("model", "m");
        let prompt = text("prompt", "{speaker} kv_transfer_params");
        let untouched = form(&[file, &model, &prompt, &text("vllm_xargs", "{\"a\": 1}")]);
        assert_eq!(sanitized(&TYPE, untouched.clone()), Ok((untouched, false)));
        let steering = form(&[
            &text("kv_transfer_params", "{}"),
            file,
            &text("bootstrap_host", "evil"),
            &text("x[routed_dp_rank]", "1"),
            &text("vllm_xargs", " {\"kv_transfer\\u005fparams\": {}, \"a\": NaN}"),
            "Content-Disposition: form-data; name=\"kv_hints\"; filename=\"x\"\r\n\r\n1",
            "Content-Disposition: form-data; name=data_parallel_rank\r\n\r\n1",
            &prompt,
        ]);
        let expected = form(&[file, &text("vllm_xargs", " {\"a\": NaN}"), &prompt]);
        assert_eq!(sanitized(&TYPE, steering), Ok((expected, true)));
    }

    #[test]
    fn fields_have_names_and_values() {
        let file = "Content-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\nContent-Type: text/plain\r\n\r\n{}\r\n";
        let fields = form_fields(&TYPE, &form(&[&text("purpose", "batch"), file])).unwrap();
        let field = |name: &str, filename: Option<&str>, value: &'static str| FormField {
            name: name.to_owned(),
            filename: filename.map(str::to_owned),
            value: Bytes::from_static(value.as_bytes()),
        };
        assert_eq!(fields, [field("purpose", None, "batch"), field("file", Some("in.jsonl"), "{}\r\n")]);
        assert_eq!(form_fields(&TYPE, &form(&["X: 1\r\n\r\n1"])), Err(FormDataError::FieldHeaders));
    }

    #[test]
    fn forms_that_parsers_may_read_differently_are_rejected() {
        for (field, what) in [
            ("Content-Disposition: form-data\r\n\r\n1", "no name"),
            ("X: 1\r\n\r\n1", "no disposition"),
            ("Content-Disposition: form-data; name=\"a\"; name=\"b\"\r\n\r\n1", "two names"),
            (
                "Content-Disposition: form-data; name=\"a\"\r\nContent-Disposition: form-data; name=\"b\"\r\n\r\n1",
                "two",
            ),
            ("Content-Disposition: form-data; name*=utf-8''kv%5fhints\r\n\r\n1", "encoded name"),
            ("Content-Disposition: form-data; name=\"a\"; name*0=\"kv\"\r\n\r\n1", "continued name"),
            ("Content-Disposition: form-data; name=\"kv\\_hints\"\r\n\r\n1", "escape"),
            ("Content-Disposition: form-data; filename=\"a\\\"; name=\"b\"\r\n\r\n1", "escaped quote"),
            ("Content-Disposition: form-data;\r\n name=\"a\"\r\n\r\n1", "folded"),
            ("Content-Disposition: form-data; name=\"a\"\nX: 1\r\n\r\n1", "line feed"),
            (
                "Content-Disposition: form-data; name=\"a\"\r\nContent-Transfer-Encoding: base64\r\n\r\n1",
                "encoding",
            ),
            ("Content-Disposition: form-data; name=\"a\"", "no end of headers"),
        ] {
            assert_eq!(sanitized(&TYPE, form(&[field])), Err(FormDataError::FieldHeaders), "{what}");
        }
        for body in
            ["", "--b0", "--b1--\r\n", "x\r\n--b0--\r\n", "--b0--\r\nx", "--b0\r\na", "--b0x\r\n--b0--"]
        {
            assert_eq!(sanitized(&TYPE, Bytes::from(body)), Err(FormDataError::Framing), "{body}");
        }
        for content_type in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=a;boundary=b",
            "multipart/form-data; boundary=\"a b\"",
        ] {
            let content_type = HeaderValue::from_static(content_type);
            assert_eq!(sanitized(&content_type, form(&[])), Err(FormDataError::Boundary), "{content_type:?}");
        }
        assert_eq!(sanitized(&TYPE, form(&vec!["X: 1\r\n\r\n"; 2000])), Err(FormDataError::TooManyFields));
    }

    #[test]
    fn the_model_is_found_also_after_a_removed_field() {
        let file = "content-disposition: form-data; name=\"file\"; filename=\"model\"\r\n\r\nmodel";
        for fields in [
            vec![text("model", "a/b"), file.to_owned()],
            vec![text("kv_hints", "1"), file.to_owned(), text("model", "a/b")],
        ] {
            let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
            let content = FormContent::read(&TYPE, form(&fields)).unwrap();
            assert_eq!(content.model_name(), Some("a/b"), "{fields:?}");
        }
        let without = FormContent::read(&TYPE, form(&[file, &text("Model", "x")])).unwrap();
        assert_eq!(without.model_name(), None);
    }

    #[test]
    fn an_ambiguous_model_is_rejected() {
        let file = "content-disposition: form-data; name=\"model\"; filename=\"a\"\r\n\r\nm";
        let not_text = Bytes::from_static(
            b"--b0\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\xff\r\n--b0--\r\n",
        );
        for (body, expected) in [
            (form(&[&text("model", "a"), &text("model", "a")]), FormDataError::SeveralModels),
            (form(&[file]), FormDataError::InvalidModel),
            (form(&[&text("model", &"m".repeat(MAX_MODEL_LEN + 1))]), FormDataError::InvalidModel),
            (not_text, FormDataError::InvalidModel),
        ] {
            assert_eq!(FormContent::read(&TYPE, body).unwrap_err(), expected);
            assert_eq!(expected.field(), Some("model"));
        }
    }
}
