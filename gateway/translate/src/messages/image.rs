//! Images.

use crate::chat::{ChatImageUrl, ChatPart};
use crate::error::Untranslatable;
use crate::json::JsonObject;

/// The chat part of an image block's source.
pub(super) fn image_part(block: &mut JsonObject<'_>) -> Result<ChatPart, Untranslatable> {
    let path = block.path_of("source");
    let mut source =
        block.object("source")?.ok_or_else(|| Untranslatable::Missing { member: path.clone() })?;
    let url = match source.required_text("type")?.as_str() {
        "base64" => {
            let media_type = source.text("media_type")?.unwrap_or_else(|| "image/png".to_owned());
            let data = source.required_text("data")?;
            if data.is_empty() {
                return Err(Untranslatable::invalid(source.path_of("data"), "an image in base64"));
            }
            format!("data:{media_type};base64,{data}")
        }
        "url" => source.required_text("url")?,
        kind => {
            let reason =
                format!("a source of type `{kind}` is not available to the engine; send `base64` or `url`");
            return Err(Untranslatable::unsupported(path, reason));
        }
    };
    source.reject_rest()?;
    Ok(ChatPart::ImageUrl { image_url: ChatImageUrl { url } })
}
