//! Checks of the members of the APIs that agents use: OpenAI's Responses and Anthropic's Messages.

use super::body_member::BodyMember;
use super::json_shape::JsonKind;
use super::routing_fields::{BodyMembers, RoutingFields, check_objects, count, expected, invalid_member};
use crate::error::ApiError;

impl<'a> BodyMembers<'a> {
    pub(super) fn check_responses(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        let input = self.shape(BodyMember::Input).filter(|shape| shape.kind != JsonKind::Null);
        match input.map(|shape| (shape, shape.kind)) {
            Some((_, JsonKind::String)) => {}
            Some((shape, JsonKind::Array)) => check_objects(BodyMember::Input, shape)?,
            Some((_, other)) => {
                return Err(expected(BodyMember::Input, "a string or an array of items", other));
            }
            // A stored prompt needs none.
            None if self.shape(BodyMember::Prompt).is_some() => {}
            None => {
                return Err(invalid_member(
                    "input",
                    "`input` is missing; send a string or an array of items",
                ));
            }
        }
        fields.prompt_bytes =
            self.text_bytes(&[BodyMember::Input, BodyMember::Instructions, BodyMember::Tools]);
        fields.media = input.and_then(|shape| shape.media.clone());
        fields.max_output_tokens = self.token_limit(BodyMember::MaxOutputTokens)?;
        Ok(())
    }

    pub(super) fn check_messages(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        self.check_message_list(fields)?;
        match self.kind(BodyMember::System) {
            JsonKind::Null | JsonKind::String | JsonKind::Array => {}
            other => return Err(expected(BodyMember::System, "a string or an array of text blocks", other)),
        }
        fields.prompt_bytes += self.text_bytes(&[BodyMember::System, BodyMember::Tools]);
        fields.max_output_tokens = self.token_limit(BodyMember::MaxTokens)?;
        Ok(())
    }

    /// Bytes of all strings in these members.
    fn text_bytes(&self, members: &[BodyMember]) -> u64 {
        members.iter().filter_map(|member| self.shape(*member)).map(|shape| shape.string_bytes).sum()
    }

    fn token_limit(&self, member: BodyMember) -> Result<Option<u32>, ApiError> {
        match self.kind(member) {
            JsonKind::Null => Ok(None),
            JsonKind::Number(limit) => count(member.key(), Some(limit)),
            other => Err(expected(member, "an integer", other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_body::InferenceApi;

    fn fields(api: InferenceApi, body: &str) -> Result<RoutingFields<'_>, ApiError> {
        RoutingFields::read(api, body.as_bytes())
    }

    fn rejected(api: InferenceApi, body: &str) -> String {
        fields(api, body).unwrap_err().param.unwrap()
    }

    #[test]
    fn responses_are_read() {
        let body = r#"{"model":"m","instructions":"Be brief.","input":[{"role":"user","content":"hello"}],
            "tools":[{"type":"function","name":"f"}],"max_output_tokens":7,"stream":true,"store":false,
            "previous_response_id":"resp_1","background":true}"#;
        let read = fields(InferenceApi::Responses, body).unwrap();
        assert_eq!((read.max_output_tokens, read.stream, read.sequences()), (Some(7), true, 1));
        assert_eq!(read.prompt_bytes, 9 + 9 + 9);
        assert_eq!(read.previous_response_id.as_deref(), Some("resp_1"));
        assert!(read.is_background && read.forbids_store);
        assert_eq!(fields(InferenceApi::Responses, r#"{"input":"hello"}"#).unwrap().prompt_bytes, 5);
    }

    #[test]
    fn messages_are_read() {
        let body = r#"{"system":[{"type":"text","text":"sys"}],"max_tokens":9,"metadata":{"user_id":"u"},
            "messages":[{"role":"user","content":[{"type":"text","text":"hi","cache_control":{"type":"ephemeral"}}]}]}"#;
        let read = fields(InferenceApi::Messages, body).unwrap();
        assert_eq!((read.max_output_tokens, read.prompt_bytes), (Some(9), 7 + 4 + 6 + 9));
        assert!(read.wants_prompt_cached && read.session.is_some());
    }

    #[test]
    fn wrong_members_are_named() {
        let responses = |body| rejected(InferenceApi::Responses, body);
        assert_eq!(responses("{}"), "input");
        assert_eq!(responses(r#"{"input":7}"#), "input");
        assert_eq!(responses(r#"{"input":[{},"a"]}"#), "input[1]");
        assert_eq!(responses(r#"{"input":"a","max_output_tokens":"7"}"#), "max_output_tokens");
        assert_eq!(responses(r#"{"input":"a","max_output_tokens":-1}"#), "max_output_tokens");
        let messages = |body| rejected(InferenceApi::Messages, body);
        assert_eq!(messages("{}"), "messages");
        assert_eq!(messages(r#"{"messages":[]}"#), "messages");
        assert_eq!(messages(r#"{"messages":["a"]}"#), "messages[0]");
        assert_eq!(messages(r#"{"messages":[{}],"system":7}"#), "system");
        assert_eq!(messages(r#"{"messages":[{}],"max_tokens":1.5}"#), "max_tokens");
    }

    #[test]
    fn the_narrowest_name_identifies_a_session() {
        let session = |members: &str| {
            fields(InferenceApi::Responses, &format!(r#"{{"input":"a"{members}}}"#)).unwrap().session
        };
        let conversation = session(r#","conversation":"c","user":"u""#);
        assert_eq!(conversation, session(r#","conversation":{"id":"c"},"prompt_cache_key":"k""#));
        assert_eq!(
            session(r#","prompt_cache_key":"k","user":"u""#),
            session(r#","prompt_cache_key":"\u006b""#)
        );
        assert_ne!(session(r#","user":"u""#), conversation);
        assert_eq!(
            session(r#","metadata":{"user_id":"u","id":7}"#),
            None,
            "the last one counts, and is no text"
        );
        assert_eq!(session(r#","metadata":{"user_id":"u","x":[{}]}"#), session(r#","user":"u""#));
        for nothing in
            ["", r#","user":"""#, r#","user":7"#, r#","conversation":null"#, r#","metadata":{"a":"b"}"#]
        {
            assert_eq!(session(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn images_of_both_apis_are_media() {
        const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAACgAAAAeCAIAAADRv8uK";
        let messages = format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{PNG}"}}}}]}},
            {{"role":"assistant","content":[{{"type":"tool_use","input":{{"source":"a file","image":"x"}}}}]}}]}}"#
        );
        let media = fields(InferenceApi::Messages, &messages).unwrap().media.unwrap();
        assert_eq!(media.listed().len(), 1, "arguments of tools are no media");
        assert_eq!(media.listed()[0].size.map(|size| (size.width, size.height)), Some((40, 30)));
        let responses = format!(
            r#"{{"input":[{{"role":"user","content":[{{"type":"input_image","image_url":"data:image/png;base64,{PNG}"}}]}}]}}"#
        );
        assert_eq!(fields(InferenceApi::Responses, &responses).unwrap().media.unwrap().listed().len(), 1);
    }
}
